"""The data that ship with Lockstep, and those a person has -> samples, and which of them each rank sees."""

"""What was planned and what was measured -> what a run came to."""

"""What a person may ask for -> checked, or refused with the rule."""

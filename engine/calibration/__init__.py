"""This machine -> what its ops take."""

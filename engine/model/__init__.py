"""A model's name and sizes -> its layers, and what each of them computes and keeps."""

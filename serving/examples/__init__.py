"""Small clients that show how the doors are used."""

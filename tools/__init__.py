"""What the project is made with; not in the package that users install."""

"""What the drop-in `DataLoader` is made of: the rooms of the package that know torch's loader."""

"""From files of any common format to records: which files, how they are unpacked and split, what their fields mean."""

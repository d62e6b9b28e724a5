"""Find, unpack, split and parse data files of any common format into records."""

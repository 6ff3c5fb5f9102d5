"""What a rewrite did, as data, words and a page."""

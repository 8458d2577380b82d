"""One file for each library that clearhead can be plugged into."""

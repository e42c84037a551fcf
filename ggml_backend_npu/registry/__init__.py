"""What an op is: its entry, its parameters, what is known of it, and what the files of ops share."""

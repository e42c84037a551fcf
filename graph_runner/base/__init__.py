"""What every room needs: errors, settings, files, the console, small models."""

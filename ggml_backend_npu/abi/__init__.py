"""The backend's C side: the only ctypes of this package."""

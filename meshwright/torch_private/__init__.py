"""The only access to torch's private names: every underscore of torch that Meshwright needs is named here and nowhere
else, so that a new release is checked in one place. Each name has a test that says what is needed of it.

Files are imported one by one: some of what they import is heavy.
"""

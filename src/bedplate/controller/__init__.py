"""What runs on the controller: profiles, locks, the command line."""

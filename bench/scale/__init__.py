"""What a simulation says of machines that nobody here has, and how well it tells of those here."""

"""The wire: contracts, generated stubs, and the one way to speak them."""

"""The wire: contracts, generated stubs, codec and naming."""

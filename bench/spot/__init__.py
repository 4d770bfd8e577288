"""A job on spot units under traces of reclaims: its bill, its deadline, and what was predicted."""

"""Off-policy learning of the embodied recipe: SAC and TD3, with the options of RLPD and CrossQ."""

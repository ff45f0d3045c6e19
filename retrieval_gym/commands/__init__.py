"""The subcommands of the ``retrieval_gym`` command line."""

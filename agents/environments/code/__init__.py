"""An environment in which the policy changes a repository and hidden tests grade the change."""

"""An environment in which the policy changes a repository. Hidden tests grade the change."""

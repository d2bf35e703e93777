"""The command `keepstep`: words in, words out; nothing is decided here."""

#!/bin/sh
# A file, because some engines split the words of a health command.
REDISCLI_AUTH="$REDIS_PASSWORD" valkey-cli ping | grep -q PONG

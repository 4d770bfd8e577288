#!/bin/sh
# A file, because some engines split the words of a health command.
REDISCLI_AUTH="$(cat /run/secrets/redis_password)" valkey-cli ping | grep -q PONG

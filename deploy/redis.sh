#!/bin/sh
# Starts the store. The password goes in through standard input: arguments can be listed by others.
set -eu
# The image's entry point gives up root first.
exec docker-entrypoint.sh valkey-server - <<CONF
dir /data
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
requirepass $REDIS_PASSWORD
CONF

#!/bin/sh
# Starts the store with TLS and a password, which comes through standard input: arguments can be
# listed by others.
set -eu
exec valkey-server - <<CONF
dir /data
port 0
tls-port 6379
tls-cert-file /certs/server.pem
tls-key-file /certs/server-key.pem
tls-ca-cert-file /certs/ca.pem
tls-auth-clients no
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
requirepass $REDIS_PASSWORD
CONF

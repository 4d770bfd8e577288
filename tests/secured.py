"""A cluster that asks for tokens."""

from chassis.channels import connect
from chassis.security import Security
from heterps.home import certs
from protos import access_pb2 as access
from protos.access_pb2_grpc import AccessStub
from scheduler.state.redis_server import EmbeddedRedis
from tests.cluster import Roles


class Secured:
    """A scheduler, a node and a shard with TLS, and callers by their tokens."""

    def __init__(self, folder):
        self.files = certs.make(folder / "certs")
        self.root = (folder / "certs" / certs.TOKEN).read_text().strip()
        self.redis = EmbeddedRedis(folder / "redis")
        self.roles = None
        self.folder = folder

    def __enter__(self):
        self.redis.__enter__()
        self.roles = Roles(self.folder / "processes", self.redis.url)
        self.scheduler = self.serve()
        return self

    def __exit__(self, *error):
        self.roles.close()
        self.redis.__exit__(*error)

    def serve(self):
        return self.roles.start(
            "scheduler.service", "--redis", self.redis.url, "--metrics", "127.0.0.1:0", **self.files
        )

    def channel(self, token, address=None):
        named = Security.from_files({**self.files, "HETERPS_TOKEN_FILE": ""})
        security = Security(authority=named.authority, token=token)
        return connect(address or self.scheduler.address, security)

    def create(self, name, role, expires_s=0.0):
        request = access.CreateTokenRequest(name=name, role=role, expires_s=expires_s)
        with self.channel(self.root) as channel:
            return AccessStub(channel).CreateToken(request, timeout=10).secret

    def revoke(self, name):
        with self.channel(self.root) as channel:
            request = access.RevokeTokenRequest(name=name)
            return AccessStub(channel).RevokeToken(request, timeout=10).revoked

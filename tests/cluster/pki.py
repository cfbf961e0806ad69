"""One authority and every certificate of a cluster. Keys are of elliptic curves: all of them take 0.3 s."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS_VALID = 30
PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One certificate: the file's name, whom it names, and as which server, if it is one."""

    file: str
    common_name: str
    groups: Sequence[str] = ()
    server_names: Sequence[str] = ()


def requests(node: str, node_ip: str, api_ip: str) -> list[Request]:
    service = "kubernetes.default.svc"
    api_names = [
        "kubernetes",
        "kubernetes.default",
        service,
        f"{service}.cluster.local",
        "localhost",
        "127.0.0.1",
    ]
    components = ("kube-controller-manager", "kube-scheduler", "kube-proxy")
    return [
        Request(
            file="apiserver",
            common_name="kube-apiserver",
            server_names=[*api_names, api_ip, node_ip],
        ),
        Request(
            file="kubelet",
            common_name=f"system:node:{node}",
            groups=["system:nodes"],
            server_names=[node, node_ip, "127.0.0.1"],
        ),
        Request(file="admin", common_name="admin", groups=["system:masters"]),
        Request(file="helpers", common_name="helpers", groups=["system:masters"]),
        Request(file="kubelet-client", common_name="kube-apiserver", groups=["system:masters"]),
        Request(file="front-proxy-client", common_name="front-proxy-client"),
        *(Request(file=name, common_name=f"system:{name}") for name in components),
    ]


@dataclass(frozen=True, slots=True)
class Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def issue(self, request: Request, public_key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        subject = x509.Name(
            [
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in request.groups),
                x509.NameAttribute(NameOID.COMMON_NAME, request.common_name),
            ]
        )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if request.server_names:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            _builder(subject, self.certificate.subject, public_key, authority=self.key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        if request.server_names:
            names = [_general_name(name) for name in request.server_names]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())


def make_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gristmill-test-ca")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder(name, name, key.public_key(), authority=key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(key, certificate)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    *,
    authority: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS_VALID))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _save_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    path.write_bytes(
        key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path.chmod(0o600)


def make_all(folder: Path, *, node: str, node_ip: str, api_ip: str) -> list[str]:
    """Write FILE.crt and FILE.key of everyone, and the key pair of service accounts; returns the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = make_authority()
    (folder / "ca.crt").write_bytes(authority.certificate.public_bytes(PEM))
    _save_key(folder / "ca.key", authority.key)
    wanted = requests(node, node_ip, api_ip)
    for request in wanted:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = authority.issue(request, key.public_key())
        (folder / f"{request.file}.crt").write_bytes(certificate.public_bytes(PEM))
        _save_key(folder / f"{request.file}.key", key)
    account_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _save_key(folder / "sa.key", account_key)
    (folder / "sa.pub").write_bytes(
        account_key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return [request.file for request in wanted]

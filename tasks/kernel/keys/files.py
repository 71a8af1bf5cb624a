"""Keys in a folder of the state: private ones in `secrets/`, public ones beside it.

What is in `secrets/` is of this machine and is in no backup, unless secrets are asked for. Several
machines of one state sign each by a key of its own, and trust those of all.
"""

import base64
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tasks.kernel.errors import ConfigurationError, LostKeyError
from tasks.kernel.files import locked, private_folder, write_atomically
from tasks.kernel.keys.store import Signature, id_of

NONCE_BYTES, KEY_BYTES = 12, 32


@dataclass(frozen=True)
class FileKeys:
    """Keys in one folder.

    Args:
        folder: holds them.
        bring: brings here what other machines have in a folder.
        publish: writes a public key for all machines.
        is_shared: whether machines share the state that the keys are of.
    """

    folder: Path
    bring: Callable[[Path], object] = lambda folder: folder
    publish: Callable[[Path, str], object] = write_atomically
    is_shared: Callable[[], bool] = lambda: False

    def sign(self, name: str, content: bytes) -> Signature:
        """See `KeyStore.sign`."""
        key_id, text = self._newest(name, signs=True)
        key = serialization.load_pem_private_key(text.encode(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)  # as `_add` makes them
        if not (self.folder / name / f"{key_id}.pub").exists():  # it was lost
            self.publish(self.folder / name / f"{key_id}.pub", _public(key).decode())
        return Signature(key_id, key.sign(content, ec.ECDSA(hashes.SHA256())))

    def public_keys(self, name: str) -> Mapping[str, bytes]:
        """See `KeyStore.public_keys`."""
        self.bring(self.folder / name)
        found = {}
        for file in sorted((self.folder / name).glob("*.pub")):
            with suppress(ValueError):  # it is no key, and nothing that it signed counts
                found[id_of(file.read_bytes())] = file.read_bytes()
        return found

    def encrypt(self, name: str, data_key: bytes) -> str:
        """See `KeyStore.encrypt`.

        Raises:
            ConfigurationError: machines share the state, and this key would be of this one alone.
        """
        if self.is_shared():
            raise ConfigurationError(
                f"FALAJ_STATE is set, and the key {name!r} in {self.folder} would be of this "
                "machine alone; name OpenBao: FALAJ_KEYS, or keys: in server.yaml. Nothing was done"
            )
        key_id, text = self._newest(name, signs=False)
        nonce = os.urandom(NONCE_BYTES)
        sealed = AESGCM(base64.b64decode(text)).encrypt(nonce, data_key, name.encode())
        return f"{key_id}:{base64.b64encode(nonce + sealed).decode()}"

    def decrypt(self, name: str, encrypted: str) -> bytes:
        """See `KeyStore.decrypt`."""
        key_id, _, text = encrypted.partition(":")
        versions = self._versions(name)
        try:
            sealed = base64.b64decode(text, validate=True)
            cipher = AESGCM(base64.b64decode(versions[key_id]))
            return cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except (KeyError, ValueError, InvalidTag) as exc:
            raise LostKeyError(
                f"the version {key_id!r} of the key {name!r} that encrypted this is not in "
                f"{self.folder} (there: {', '.join(versions) or 'none'}), or what it encrypted was "
                "changed. It cannot be read without it; restore the key from a copy of the folder"
            ) from exc

    def rotate(self, name: str) -> None:
        """See `KeyStore.rotate`."""
        with locked(self._lock(name)):
            versions = self._versions(name)
            self._add(name, versions, signs="BEGIN" in next(iter(versions.values()), "BEGIN"))

    def destroy(self, name: str) -> None:
        """See `KeyStore.destroy`."""
        with locked(self._lock(name)), suppress(FileNotFoundError):
            file = self._file(name)
            file.write_bytes(os.urandom(file.stat().st_size))
            file.unlink()

    def _newest(self, name: str, *, signs: bool) -> tuple[str, str]:
        if not (versions := self._versions(name)):
            with locked(self._lock(name)):
                versions = self._versions(name) or self._add(name, {}, signs=signs)
        return list(versions.items())[-1]

    def _add(self, name: str, versions: Mapping[str, str], *, signs: bool) -> dict[str, str]:
        if signs:
            key = ec.generate_private_key(ec.SECP256R1())
            form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            text = key.private_bytes(serialization.Encoding.PEM, *form).decode()
            public = _public(key)
            key_id = id_of(public)
            self.publish(self.folder / name / f"{key_id}.pub", public.decode())
        else:
            key_id = os.urandom(8).hex()
            text = base64.b64encode(os.urandom(KEY_BYTES)).decode()
        added = {**versions, key_id: text}
        write_atomically(self._file(name), json.dumps(added), private=True)
        return added

    def _versions(self, name: str) -> dict[str, str]:
        """Private keys by id, the newest last."""
        try:
            found = json.loads(self._file(name).read_text())
            return {str(key_id): str(text) for key_id, text in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError) as exc:
            raise LostKeyError(
                f"{self._file(name)} is damaged; expected the private keys {name!r}. Bring it from "
                "a copy, or move it away: a new key is made, and what is signed stays valid"
            ) from exc

    def _file(self, name: str) -> Path:
        return self.folder / "secrets" / f"{name}.json"

    def _lock(self, name: str) -> Path:
        return private_folder(self.folder / "secrets") / f"{name}.lock"


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(*form)

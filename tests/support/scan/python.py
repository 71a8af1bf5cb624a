# ruff: noqa
"""Examples, bad and good, of what the rules in infra/scan/rules/python.yaml look for; never run."""

import numpy as np, pandas as pd
from pickle import loads

# ruleid: unpickling
loads(text)
# ruleid: unpickling
pd.read_pickle(file)
# ruleid: unpickling
np.load(file, allow_pickle=True)
# ruleid: unpickling
torch.load(file, weights_only=False)
# ok: unpickling
torch.load(file, map_location="cpu", weights_only=True)
# ruleid: unpickling
torch.export.load(file)
# ruleid: yaml-that-makes-objects
yaml.load(text, Loader=yaml.Loader)
# ok: yaml-that-makes-objects
yaml.load(text, yaml.CSafeLoader)
# ruleid: shell
subprocess.run(f"ls {folder}", shell=True)
# ruleid: shell
os.system(line)
# ok: shell
subprocess.run(["ls", folder])
# ruleid: secret-on-a-command-line
subprocess.Popen(["tool", "-p", config.admin_token, "x"])
# ruleid: secret-on-a-command-line
subprocess.run(["tool", f"key={api_key}"], check=True)
# ruleid: secret-on-a-command-line
command = ["tool", "--password", given]
# ok: secret-on-a-command-line
subprocess.run(["tool", "--password-file", file])
# ruleid: sql-from-text
con.execute("SELECT * FROM t WHERE name = '%s'" % name)
# ruleid: sql-from-text
con.execute("DELETE FROM t WHERE name = " + name)
# ruleid: sql-from-text
con.execute(f"SELECT * FROM t WHERE a = 'x' AND name = '{x.name}'")
# ruleid: sql-from-text
rows = f"SELECT * FROM read_parquet('{folder}/{month}.parquet')"
# ok: sql-from-text
con.execute(f"SELECT * FROM {sql_name(table)} WHERE name = {sql_text(name)}")
# ok: sql-from-text
con.execute(f"SELECT strftime({moment}, '%Y'), {columns}, 'x' FROM t")


def unpack(file, folder):
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            # ruleid: path-from-outside
            (folder / name).write_bytes(archive.read(name))
        # ruleid: archive-unpacked-whole
        archive.extract(name, folder)
    with tarfile.open(file) as archive:
        # ruleid: archive-unpacked-whole
        archive.extractall(folder)
        # ok: archive-unpacked-whole
        archive.extractall(folder, filter="data")
    # ruleid: archive-unpacked-whole
    shutil.unpack_archive(file, folder)


def serve(request, folder):
    name = request.path_params["name"]
    # ruleid: path-from-outside
    shutil.rmtree(folder / name)
    count = int(request.query_params["count"])
    # ok: path-from-outside
    return folder / str(count)


# ruleid: tls-unchecked
httpx.get(url, verify=False)
# ok: tls-unchecked
store.path(artifact, verify=False)
# ruleid: tls-unchecked
mode = ssl.CERT_NONE
# ruleid: tls-below-13
oldest = ssl.TLSVersion.TLSv1_2
# ruleid: tls-below-13
old = ssl.create_default_context()


def context():
    # ok: tls-below-13
    new = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    new.minimum_version = ssl.TLSVersion.TLSv1_3
    return new


# ruleid: grpc-in-the-clear
server.add_insecure_port(address)
# ruleid: every-address
host = "0.0.0.0"
# ok: every-address
host = "127.0.0.1"
# ruleid: code-from-text
exec(text)
# ok: code-from-text
network.eval()
# ruleid: name-before-file
tempfile.mktemp()
# ruleid: weak-hash
hashlib.md5(content)
# ruleid: weak-hash
hashlib.file_digest(stream, "md5")
# ok: weak-hash
hashlib.sha1(content, usedforsecurity=False)

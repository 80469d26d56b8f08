import time, pytest, sys, subprocess, shutil, os
from pathlib import Path
from nodekit.deploy import ssh, sync, transfer
from nodekit.deploy.link import open_ssh, open_local, on_all
pytest_plugins=["sshd"]
@pytest.mark.parametrize("mode",["rsync"])
@pytest.mark.parametrize("base",["/dev/shm","/tmp"])
def test_a(start_sshd, target, monkeypatch, own_home, mode, base):
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_home/".cache"))
    s=[start_sshd() for _ in range(3)]
    w=Path(base)/"hsw"; shutil.rmtree(w,ignore_errors=True)
    for r in range(3):
        links={f"g{i}":open_ssh(ssh.connect(target(s[i],name=f"g{i}")),f"g{i}",sys.executable) for i in range(3)}
        for rep in range(2):
            t=time.time(); tree=sync.take(Path("/tmp/hs/src")); t1=time.time()
            res=sync.send(tree,{n:sync.Target(l,dest=str(w/n/f"runs/{r}-{rep}/code"),cache=str(w/n/"code/src")) for n,l in links.items()},timeout_s=100)
            t2=time.time(); print(base,mode,r,rep,"take",round(t1-t,3),"send",round(t2-t1,3),{n:(getattr(v,"files_sent",None) if not isinstance(v,Exception) else v) for n,v in res.items()})
            t=time.time(); print("settle", sync.settle({n:sync.Target(l,dest="",cache=str(w/n/"code/src")) for n,l in links.items()},timeout_s=30), round(time.time()-t,2))
        [l.close() for l in links.values()]
        shutil.rmtree(w) if r==1 else None
    shutil.rmtree(w)
    links={f"g{i}":ssh.connect(target(s[i],name=f"g{i}")) for i in range(3)}
    for rep in range(3):
      for nm,k in (("default",None),("ours",1)):
        w.mkdir(); t=time.time()
        ps=[]
        for i in range(3):
            rsh=transfer.rsh_option(links[f"g{i}"].rsync_rsh())
            if k is None: rsh=rsh.replace("-o' 'Ciphers=","-o' 'SetEnv=X=")
            ps.append(subprocess.Popen(["rsync","-a","-e",rsh,"/tmp/hs/src/",f"host:{w}/{i}/"]))
        assert [p.wait() for p in ps]==[0,0,0]; print(nm,"plain rsync",round(time.time()-t,3)); shutil.rmtree(w)
    [l.close() for l in links.values()]

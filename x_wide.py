import sys, time
import numpy as np, cupy as cp, cuflash, torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
def timeit(f, n=None):
    f(); cp.cuda.Device().synchronize(); torch.cuda.synchronize()
    best=1e9
    for rep in range(3):
        a=cp.cuda.Event(); b=cp.cuda.Event()
        a.record(); 
        for _ in range(3): f()
        b.record(); b.synchronize()
        best=min(best, cp.cuda.get_elapsed_time(a,b)/3)
    return best
N=int(sys.argv[1])
for D in map(int,sys.argv[2].split(',')):
    H=max(1024//D,1); B=max(8192//N,1)
    if 1024%D: H=2
    q,k,v=(cp.random.standard_normal((B,H,N,D)) for _ in range(3))
    fl=4*B*H*N*N*D
    t=[torch.from_dlpack(x) for x in (q,k,v)]
    s=torch.cuda.Stream(); 
    def math():
        with sdpa_kernel(SDPBackend.MATH): return F.scaled_dot_product_attention(*t)
    row=[]
    cp_stream=cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    with cp_stream:
        ref=math(); 
        def naive():
            s=q@k.swapaxes(-1,-2)*(D**-.5); s-=s.max(-1,keepdims=True); cp.exp(s,out=s); s/=s.sum(-1,keepdims=True); return s@v
        row.append(('math',fl/timeit(math)/1e9))
        row.append(('naive',fl/timeit(naive)/1e9))
        for c in (False,True):
            for ker,tile in (('precise_float64',''),('precise_wide','32x128' if D>256 else '32x%d'%(D//4)),):
                try:
                    with cuflash.options(kernel=ker,tile=tile):
                        out=cuflash.attention(q,k,v,causal=c)
                        ms=timeit(lambda: cuflash.attention(q,k,v,causal=c))
                    err='' if c else '%.0e'%float(cp.abs(out-cp.from_dlpack(ref)).max())
                    row.append((ker[8:]+tile+('c' if c else ''),round(fl/(2 if c else 1)/ms/1e9,1),err))
                except Exception as e: row.append((ker,tile,str(e)[:60]))
    print(N,D,*row,flush=True)

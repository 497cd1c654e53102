import sys, cupy as cp, cuflash
D,N=int(sys.argv[1]),int(sys.argv[2])
q=cp.random.standard_normal((8192//N,2,N,D)) 
with cuflash.options(kernel=sys.argv[3],tile=sys.argv[4]):
    for _ in range(3): cuflash.attention(q,q,q)
cp.cuda.Device().synchronize()

export PYTHONPATH=$PWD CUFLASH_COMPILE=lazy
python3 x_wide.py 4096 512,448,384,320,256,192,128
bash x_ncu.sh 512 4096 >/dev/null

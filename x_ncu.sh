ncu --set full --section SourceCounters --section WarpStateStats -k regex:precise_wide -s 1 -c 1 -o /tmp/r -f python3 x_one.py ${1:-512} ${2:-4096} precise_wide ${3:-32x128} > /tmp/ncu.txt 2>&1; tail -1 /tmp/ncu.txt
ncu -i /tmp/r.ncu-rep --page details 2>/dev/null | grep -E "Duration|Executed Ipc|Issue Slots Busy|No Eligible|One or More|Eligible Warps|Active Warps|Cycles|Tensor|pipeline|Est. Speedup|stall|L2|Throughput|Frequency" | head -60
ncu -i /tmp/r.ncu-rep --page source --csv --print-units base 2>/dev/null > $OUT/src.csv
ncu -i /tmp/r.ncu-rep --page raw 2>/dev/null | grep -E "smsp__average_warps_issue_stalled.*_per_issue_active|pipe_fp64|inst_executed_pipe|lts__t_sectors_op_read.sum |lts__throughput|l1tex__data_bank|dmma|l1tex__data_pipe" | head -60

//! x
use kivi_cuda::offline::*;
fn main() {
    let tools = Toolchain::open(std::path::Path::new("target/cuda-tools")).unwrap();
    std::fs::create_dir_all("target/codegen").unwrap();
    for p in problems() { for a in Architecture::ALL {
        for r in record(a, &*p.launch).unwrap() {
            let base = format!("target/codegen/{}_{a}", p.name.replace([',',' '], "_"));
            std::fs::write(format!("{base}.cu"), &r.source).unwrap();
            let m = tools.assemble(&r.source, a).unwrap();
            std::fs::write(format!("{base}.ptx"), &m.ptx).unwrap();
            std::fs::write(format!("{base}.sass"), &m.machine_code).unwrap();
            println!("{} {a}: regs {} spill {} stack {} smem {}+{} threads {}", p.name, m.registers, m.spill_bytes, m.stack_bytes, m.shared_bytes, r.shared_bytes, r.threads());
            for l in code_loops(&m.machine_code, p.bits).unwrap() {
                println!("   {} instr {} codes = {:.3}  hmma {} ldg {}/{} {:?}", l.instructions, l.codes, f64::from(l.instructions)/f64::from(l.codes), l.matrix_products, l.wide_loads, l.narrow_loads, l.opcodes);
            }
            let total = m.machine_code.lines().filter(|l| l.trim_start().starts_with("/*0") && l.contains(';')).count();
            println!("   total static {total}");
        }
    } }
}

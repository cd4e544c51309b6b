//! Reads nvdisasm's text: instructions, loops, and the loops that unpack codes.

use super::CodegenError;
use std::collections::BTreeMap;

/// One instruction.
struct Instruction {
    address: u64,
    /// Without predicate: `LOP3.LUT R5, R4, 0x30003, RZ, 0xc0, !PT`.
    text: String,
}

impl Instruction {
    fn opcode(&self) -> &str {
        self.text.split_whitespace().next().unwrap_or("")
    }
}

/// A loop that unpacks codes, inner loops included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeLoop {
    /// Instructions of one trip.
    pub instructions: u32,
    /// Codes that a thread unpacks in one trip.
    pub codes: u32,
    /// Instructions by opcode, without modifiers.
    pub opcodes: BTreeMap<String, u32>,
    /// Products of the matrix units: `HMMA.16816`, 16 · 8 · 16 multiply-adds per warp.
    pub matrix_products: u32,
    /// 128-bit loads from global memory.
    pub wide_loads: u32,
    /// Narrower loads from global memory.
    pub narrow_loads: u32,
}

/// How a kernel takes codes out of words, which is how they are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Masks {
    /// Two at a time, 16 bits apart.
    Pairs,
    /// One at a time. The arithmetic of addresses in a loop may look the same (`lane & 3`): look at
    /// the machine code before trusting the count.
    Single,
}

/// What [`inspect`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineCode {
    /// The loops that unpack codes, in the order of the code.
    pub loops: Vec<CodeLoop>,
    /// Instructions outside of them, without padding, up to the end of the kernel proper: what a
    /// thread executes once, at most.
    pub outside: u32,
}

/// The loops of a disassembly that unpack codes of `bits` bits, and what is outside of them.
///
/// A code is counted where a word is masked, by the immediate of `bits` ones. So a loop that the compiler unrolled counts
/// right. A loop is a backward branch; nested ones belong to the outermost. Copies that the
/// compiler put behind an unconditional exit (for divergent barriers) do not count.
///
/// # Errors
///
/// [`CodegenError::Unreadable`] if there are no instructions.
pub fn inspect(disassembly: &str, bits: u32, masks: Masks) -> Result<MachineCode, CodegenError> {
    let (instructions, labels) = parse(disassembly);
    if instructions.is_empty() {
        let what = "nvdisasm: no instructions".to_owned();
        return Err(CodegenError::Unreadable { what });
    }
    let mut loops: Vec<(u64, u64)> = Vec::new();
    for instruction in &instructions {
        let target = branch_target(&instruction.text).and_then(|label| labels.get(label));
        let Some(&start) = target.filter(|&&target| target < instruction.address) else {
            continue;
        };
        let end = instruction.address;
        let inside = |i: &&Instruction| (start..=end).contains(&i.address);
        // A predicate is cut off while parsing, but an exit under one keeps its mark.
        if instructions.iter().filter(inside).any(|i| i.text == "EXIT") {
            continue;
        }
        loops.push((start, end));
    }
    // Outermost only.
    let outer = |&(start, end): &(u64, u64)| {
        !loops.iter().any(|&(s, e)| (s, e) != (start, end) && s <= start && end <= e)
    };
    let mut outermost: Vec<_> = loops.iter().copied().filter(outer).collect();
    outermost.sort_unstable();
    outermost.dedup();

    // Behind the last exit are copies for divergent warps.
    let last = outermost.last().map_or(0, |&(_, end)| end);
    let end = instructions.iter().find(|i| i.address > last && i.text == "EXIT");
    let end = end.map_or(u64::MAX, |exit| exit.address);
    let proper = |i: &&Instruction| i.opcode() != "NOP" && i.address <= end;
    let all = instructions.iter().filter(proper).count();
    let outside = u32::try_from(all).unwrap_or(u32::MAX);
    let mut code = MachineCode { loops: Vec::new(), outside };
    for (start, end) in outermost {
        let body: Vec<_> =
            instructions.iter().filter(|i| (start..=end).contains(&i.address)).collect();
        let counted = count(&body, bits, masks);
        if counted.codes > 0 {
            let padding = counted.opcodes.get("NOP").copied().unwrap_or(0);
            code.outside -= counted.instructions - padding;
            code.loops.push(counted);
        }
    }
    Ok(code)
}

fn count(body: &[&Instruction], bits: u32, masks: Masks) -> CodeLoop {
    let mut opcodes = BTreeMap::new();
    let (mut codes, mut wide_loads, mut narrow_loads) = (0, 0, 0);
    for instruction in body {
        let opcode = instruction.opcode();
        let family = opcode.split('.').next().unwrap_or(opcode);
        *opcodes.entry(family.to_owned()).or_insert(0) += 1;
        match family {
            "LOP3" => codes += fields(&instruction.text, bits, masks),
            "LDG" if opcode.contains(".128") => wide_loads += 1,
            "LDG" => narrow_loads += 1,
            _ => {}
        }
    }
    CodeLoop {
        instructions: u32::try_from(body.len()).unwrap_or(u32::MAX),
        codes,
        matrix_products: opcodes.get("HMMA").copied().unwrap_or(0),
        wide_loads,
        narrow_loads,
        opcodes,
    }
}

/// Codes that a LOP3 masks, by its immediate.
fn fields(text: &str, bits: u32, masks: Masks) -> u32 {
    let ones = (1_u64 << bits) - 1;
    let (field, width, count) = match masks {
        Masks::Pairs => (ones | ones << 16, 16, 2),
        Masks::Single => (ones, 32, 1),
    };
    // Behind the three inputs come the truth table, an immediate, too, and a predicate.
    let mut operands: Vec<&str> = text.split(',').collect();
    operands.truncate(operands.len().saturating_sub(2));
    let immediates = operands.into_iter().filter_map(|operand| operand.trim().strip_prefix("0x"));
    let mut immediates = immediates.filter_map(|hex| u64::from_str_radix(hex, 16).ok());
    let is_mask = |mask: u64| (0..=width - bits).any(|shift| mask == field << shift);
    if immediates.any(is_mask) { count } else { 0 }
}

/// Instructions, and addresses of labels.
fn parse(disassembly: &str) -> (Vec<Instruction>, BTreeMap<&str, u64>) {
    let mut instructions: Vec<Instruction> = Vec::new();
    let (mut labels, mut waiting) = (BTreeMap::new(), Vec::new());
    for line in disassembly.lines() {
        if let Some(label) = line.strip_prefix('.').and_then(|line| line.strip_suffix(':')) {
            waiting.push(label);
            continue;
        }
        // `        /*00a0*/                   @P0 EXIT ;`
        let Some((address, rest)) =
            line.trim_start().strip_prefix("/*").and_then(|line| line.split_once("*/"))
        else {
            continue;
        };
        let (Ok(address), Some((text, _))) =
            (u64::from_str_radix(address, 16), rest.split_once(';'))
        else {
            continue;
        };
        for label in waiting.drain(..) {
            labels.insert(label, address);
        }
        let text = text.trim();
        let text = match text.split_once(' ') {
            // The trailing space keeps a conditional exit apart from `EXIT`.
            Some((predicate, rest)) if predicate.starts_with('@') => format!("{} ", rest.trim()),
            _ => text.to_owned(),
        };
        instructions.push(Instruction { address, text });
    }
    (instructions, labels)
}

/// The label that a branch names: ``BRA `(.L_x_3)``.
fn branch_target(text: &str) -> Option<&str> {
    if !text.starts_with("BRA") {
        return None;
    }
    let (_, label) = text.split_once("`(.")?;
    label.split_once(')').map(|(label, _)| label)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.text.kernel:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/              @P0  EXIT ;
.L_x_1:
        /*0020*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
.L_x_2:
        /*0030*/                   LOP3.LUT R8, R4, 0x30003, RZ, 0xc0, !PT ;
        /*0040*/                   LOP3.LUT R9, R4, 0xc000c0, RZ, 0xc0, !PT ;
        /*0050*/                   LOP3.LUT R9, R4, 0x3, RZ, 0xc0, !PT ;
        /*0060*/              @P1  BRA `(.L_x_2) ;
        /*0070*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0080*/              @!P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   LOP3.LUT R8, R4, 0x30003, RZ, 0xc0, !PT ;
        /*00b0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
";

    #[test]
    fn loops_and_masks() {
        let code = inspect(TEXT, 2, Masks::Pairs).unwrap();
        let loops = code.loops;
        assert_eq!(loops.len(), 1, "the copy behind the exit does not count");
        assert_eq!(loops[0].instructions, 7);
        assert_eq!(loops[0].codes, 4);
        assert_eq!(loops[0].matrix_products, 1);
        assert_eq!((loops[0].wide_loads, loops[0].narrow_loads), (1, 0));
        assert_eq!(loops[0].opcodes["LOP3"], 3);
        assert_eq!(code.outside, 3, "two before, the exit behind");
        assert_eq!(inspect(TEXT, 2, Masks::Single).unwrap().loops[0].codes, 1);
        assert!(inspect(TEXT, 4, Masks::Pairs).unwrap().loops.is_empty());
        assert!(inspect("", 2, Masks::Pairs).is_err());
    }
}

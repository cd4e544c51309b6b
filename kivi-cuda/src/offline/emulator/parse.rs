//! PTX text to instructions: of one kernel without calls or local memory.

use super::arithmetic::Compute;
use super::stuck;
use crate::offline::CodegenError;
use std::collections::HashMap;

/// Where a load or store goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Global,
    Shared,
    Parameter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShuffleMode {
    Xor,
    Index,
    Up,
    Down,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// Of a word in global memory.
    AtomicAdd,
    Branch(usize),
    Exit,
    BlockBarrier,
    WarpBarrier,
    Shuffle(ShuffleMode),
    /// `mma.m16n8k16`.
    Matrix,
    Load {
        space: Space,
        bytes: usize,
    },
    Store {
        space: Space,
        bytes: usize,
    },
    Compute(Compute),
    /// Several sources to one register.
    Pack,
}

/// A value that an instruction reads. Axes are 0 to 2.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operand {
    Register(usize),
    Immediate(u64),
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
    WarpSize,
}

pub(super) struct Instruction {
    /// Register of a predicate, and the value it must have.
    pub(super) guard: Option<(usize, bool)>,
    pub(super) operation: Operation,
    pub(super) destinations: Vec<usize>,
    pub(super) sources: Vec<Operand>,
    /// Of a memory operand.
    pub(super) offset: u64,
    /// Whether a packed register has 32 bits, not 64.
    pub(super) narrow: bool,
}

pub(super) struct Program {
    pub(super) instructions: Vec<Instruction>,
    pub(super) registers: usize,
    /// Offset and size of each parameter.
    layout: Vec<(usize, usize)>,
}

impl Program {
    /// The parameters' bytes: pointers, then a struct.
    pub(super) fn parameters(
        &self,
        pointers: &[u64],
        info: &[u64],
    ) -> Result<Vec<u8>, CodegenError> {
        let size = self.layout.last().map_or(0, |(offset, size)| offset + size);
        let mut bytes = vec![0; size];
        let info: Vec<u8> = info.iter().flat_map(|word| word.to_le_bytes()).collect();
        let pointers: Vec<_> = pointers.iter().map(|pointer| pointer.to_le_bytes()).collect();
        let mut values: Vec<&[u8]> = pointers.iter().map(|bytes| &bytes[..]).collect();
        if self.layout.len() == values.len() + 1 {
            values.push(&info);
        }
        if self.layout.len() != values.len() {
            let found = self.layout.len();
            return Err(stuck(&format!("{} buffers for {found} parameters", pointers.len())));
        }
        for (&(offset, size), value) in self.layout.iter().zip(values) {
            // What CubeCL passes is padded to whole words of 64 bits.
            let length = size.min(value.len());
            bytes[offset..offset + length].copy_from_slice(&value[..length]);
        }
        Ok(bytes)
    }
}

/// Names to numbers.
#[derive(Default)]
struct Names<'a> {
    registers: HashMap<&'a str, usize>,
    labels: HashMap<&'a str, usize>,
    parameters: HashMap<&'a str, u64>,
}

/// Parses the only kernel of `ptx`.
pub(super) fn program(ptx: &str) -> Result<Program, CodegenError> {
    let (_, kernel) = ptx.split_once(".entry").ok_or_else(|| stuck("PTX without a kernel"))?;
    let (header, rest) = kernel.split_once('(').ok_or_else(|| stuck("a kernel without (…)"))?;
    let (parameters, body) = rest.split_once(')').ok_or_else(|| stuck("a kernel without )"))?;
    let (_, body) = body.split_once('{').ok_or_else(|| stuck("a kernel without a body"))?;
    if ptx.contains(".func") || body.contains(".local") {
        return Err(stuck(&format!("{} calls functions or has local memory", header.trim())));
    }
    let mut names = Names::default();
    let layout = parameter_layout(parameters, &mut names)?;

    // Lines that are no statements: places in the source, comments.
    let lines = body.lines().map(|line| line.split("//").next().unwrap_or("").trim());
    let text: String = lines.filter(|l| !l.starts_with(".loc")).flat_map(|l| [l, " "]).collect();
    let mut statements = Vec::new();
    for statement in text.split(';') {
        let mut statement = statement.trim_matches(|c: char| c.is_whitespace() || c == '}');
        // A statement may begin with scopes and labels; braces of operands come later.
        loop {
            statement = statement.trim_start_matches(|c: char| c.is_whitespace() || c == '{');
            statement = statement.trim_start_matches(|c: char| c.is_whitespace() || c == '}');
            match statement.split_once(':') {
                Some((label, rest)) if label.starts_with('$') => {
                    names.labels.insert(label, statements.len());
                    statement = rest;
                }
                _ => break,
            }
        }
        if !statement.is_empty() && !statement.starts_with('.') {
            statements.push(statement);
        }
    }
    // The closing brace of a vector operand was cut off where it ended the statement.
    let statements: Vec<String> = statements
        .into_iter()
        .map(|s| {
            if s.matches('{').count() > s.matches('}').count() {
                format!("{s}}}")
            } else {
                s.into()
            }
        })
        .collect();
    let mut owned =
        Names { labels: names.labels, parameters: names.parameters, ..Names::default() };
    let instructions: Result<Vec<_>, _> =
        statements.iter().map(|statement| instruction(statement, &mut owned)).collect();
    Ok(Program { instructions: instructions?, registers: owned.registers.len(), layout })
}

/// Offsets and sizes; names with their offsets go to `names`.
fn parameter_layout<'a>(
    text: &'a str,
    names: &mut Names<'a>,
) -> Result<Vec<(usize, usize)>, CodegenError> {
    let mut layout = Vec::new();
    let mut end = 0_usize;
    for parameter in text.split(',') {
        // `.param .u64 name` or `.param .align 4 .b8 name[80]`
        let words: Vec<_> = parameter.split_whitespace().collect();
        let (name, size, align) = match words[..] {
            [".param", ".u64", name] => (name, 8, 8),
            [".param", ".align", align, ".b8", name] => {
                let (name, length) = name.split_once('[').unwrap_or((name, ""));
                let length = length.trim_end_matches(']').parse().ok();
                let align = align.parse().ok();
                let (Some(length), Some(align)) = (length, align) else {
                    return Err(stuck(&format!("the parameter {parameter}")));
                };
                (name, length, align)
            }
            _ => return Err(stuck(&format!("the parameter {parameter}"))),
        };
        let offset = end.next_multiple_of(align);
        names.parameters.insert(name, offset as u64);
        layout.push((offset, size));
        end = offset + size;
    }
    Ok(layout)
}

fn instruction<'a>(text: &'a str, names: &mut Names<'a>) -> Result<Instruction, CodegenError> {
    let unknown = || stuck(&format!("PTX instruction not known: {text}"));
    let (guard, rest) = match text.strip_prefix('@') {
        Some(rest) => {
            let (predicate, rest) = rest.split_once(char::is_whitespace).ok_or_else(unknown)?;
            let name = predicate.trim_start_matches('!');
            (Some((register(name, names), !predicate.starts_with('!'))), rest.trim_start())
        }
        None => (None, text),
    };
    let (mnemonic, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let parts: Vec<_> = mnemonic.split('.').collect();
    let mut groups = operand_groups(operands);
    let mut made = Instruction {
        guard,
        operation: Operation::Exit,
        destinations: Vec::new(),
        sources: Vec::new(),
        offset: 0,
        narrow: mnemonic.ends_with("32"),
    };

    let type_bytes = || {
        let bits: Option<usize> =
            parts.last().and_then(|t| t.get(1..)).and_then(|b| b.parse().ok());
        bits.map(|bits| bits / 8).filter(|bytes| matches!(bytes, 1 | 2 | 4 | 8))
    };
    let space = || match parts.get(1) {
        Some(&"shared") => Space::Shared,
        Some(&"param") => Space::Parameter,
        _ => Space::Global,
    };
    match parts[0] {
        "ret" | "exit" => return Ok(made),
        "bra" => {
            let target = groups.first().and_then(|g| g.first()).and_then(|l| names.labels.get(l));
            made.operation = Operation::Branch(*target.ok_or_else(unknown)?);
            return Ok(made);
        }
        "bar" | "barrier" => {
            let warp = parts.get(1) == Some(&"warp");
            made.operation = if warp { Operation::WarpBarrier } else { Operation::BlockBarrier };
            return Ok(made);
        }
        "ld" => {
            made.operation =
                Operation::Load { space: space(), bytes: type_bytes().ok_or_else(unknown)? };
        }
        "atom" if mnemonic == "atom.global.add.u32" => made.operation = Operation::AtomicAdd,
        "st" => {
            made.operation =
                Operation::Store { space: space(), bytes: type_bytes().ok_or_else(unknown)? };
        }
        "shfl" => {
            made.operation = Operation::Shuffle(match parts.get(2) {
                Some(&"bfly") => ShuffleMode::Xor,
                Some(&"idx") => ShuffleMode::Index,
                Some(&"up") => ShuffleMode::Up,
                Some(&"down") => ShuffleMode::Down,
                _ => return Err(unknown()),
            });
        }
        "mma" if mnemonic == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => {
            made.operation = Operation::Matrix;
        }
        "mov" if groups.len() == 2 && groups[1].len() > 1 => made.operation = Operation::Pack,
        _ => made.operation = Operation::Compute(Compute::parse(&parts).ok_or_else(unknown)?),
    }
    // A store has no result; all others name theirs first, of which a shuffle has two.
    if !matches!(made.operation, Operation::Store { .. }) {
        if groups.is_empty() {
            return Err(unknown());
        }
        made.destinations = groups
            .remove(0)
            .into_iter()
            .flat_map(|name| name.split('|'))
            .map(|name| register(name, names))
            .collect();
    }
    for name in groups.into_iter().flatten() {
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let (name, offset) = match address {
            Some(address) => address.split_once('+').unwrap_or((address, "0")),
            None => (name, "0"),
        };
        if address.is_some() {
            made.offset = offset.parse::<i64>().map_err(|_| unknown())? as u64;
        }
        made.sources.push(operand(name.trim(), names).ok_or_else(unknown)?);
    }
    if matches!(made.operation, Operation::Compute(_)) && made.sources.len() > 4 {
        return Err(unknown());
    }
    Ok(made)
}

/// Operands; those of a vector `{a, b}` together.
fn operand_groups(text: &str) -> Vec<Vec<&str>> {
    let mut groups = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let group;
        if let Some(vector) = rest.strip_prefix('{') {
            let (inside, after) = vector.split_once('}').unwrap_or((vector, ""));
            group = inside.split(',').map(str::trim).collect();
            rest = after.trim_start();
            rest = rest.strip_prefix(',').unwrap_or(rest);
        } else {
            let (one, after) = rest.split_once(',').unwrap_or((rest, ""));
            group = vec![one.trim()];
            rest = after;
        }
        groups.push(group);
        rest = rest.trim_start();
    }
    groups
}

fn register<'a>(name: &'a str, names: &mut Names<'a>) -> usize {
    let next = names.registers.len();
    *names.registers.entry(name.trim()).or_insert(next)
}

fn operand<'a>(name: &'a str, names: &mut Names<'a>) -> Option<Operand> {
    let axis = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((special, part)) = name.split_once('.')
        && special.starts_with('%')
    {
        let axis = axis(part)?;
        return match special {
            "%tid" => Some(Operand::Thread(axis)),
            "%ntid" => Some(Operand::Threads(axis)),
            "%ctaid" => Some(Operand::Block(axis)),
            "%nctaid" => Some(Operand::Blocks(axis)),
            _ => None,
        };
    }
    match name {
        "%laneid" => return Some(Operand::Lane),
        "WARP_SZ" => return Some(Operand::WarpSize),
        // The only variable of the kernels; its address in its space.
        "dynamic_shared_mem" => return Some(Operand::Immediate(0)),
        _ => {}
    }
    if let Some(&offset) = names.parameters.get(name) {
        return Some(Operand::Immediate(offset));
    }
    // 0f3F800000, 0d…, 0x…, decimal.
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok().map(Operand::Immediate);
    if let Some(digits) = name.strip_prefix("0f").or_else(|| name.strip_prefix("0d")) {
        return hex(digits);
    }
    if let Some(digits) = name.strip_prefix("0x") {
        return hex(digits);
    }
    if let Ok(number) = name.parse::<i64>() {
        return Some(Operand::Immediate(number as u64));
    }
    Some(Operand::Register(register(name, names)))
}

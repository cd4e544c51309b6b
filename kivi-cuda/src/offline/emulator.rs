//! Runs PTX, slowly and exactly: what matrix units, 32-wide shuffles and barriers do, without a
//! device.
//!
//! Every thread runs on its own until it waits for others (a barrier, a shuffle, a product of the
//! matrix units); an operation of a warp happens when all its threads are at it. There is no model
//! of divergence, memory order or time. Memory that was never written holds NaN, and every access
//! outside an allocation is an error. Known are the instructions that the kernels become; others
//! are an error that names them.

mod arithmetic;
mod memory;
mod parse;
mod warp;

pub(super) use memory::{GlobalMemory, HostStorage};

use super::CodegenError;
use arithmetic::evaluate;
use parse::{Instruction, Operand, Operation, Program, Space};

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: [u32; 3],
    pub(super) threads: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(super) shared_bytes: usize,
}

/// Instructions that the threads of a launch may take together: an endless loop ends in an error.
const LIMIT: u64 = 4_000_000_000;

/// Runs the kernel of `ptx`; `pointers` are its first parameters, `info` is the last.
pub(super) fn run(
    ptx: &str,
    grid: Grid,
    pointers: &[u64],
    info: &[u64],
    memory: &mut GlobalMemory,
) -> Result<(), CodegenError> {
    let program = parse::program(ptx)?;
    let parameters = program.parameters(pointers, info)?;
    let mut budget = LIMIT;
    for z in 0..grid.blocks[2] {
        for y in 0..grid.blocks[1] {
            for x in 0..grid.blocks[0] {
                let mut block = Block::new(&program, grid, [x, y, z], &parameters, memory);
                block.run(&mut budget)?;
            }
        }
    }
    Ok(())
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// At a barrier of the block.
    Block,
    /// At an operation of its warp.
    Warp,
    Done,
}

struct Thread {
    registers: Vec<u64>,
    next: usize,
    state: State,
    /// `tid.x`, `tid.y`, `tid.z`.
    id: [u32; 3],
}

struct Block<'a> {
    program: &'a Program,
    grid: Grid,
    index: [u32; 3],
    parameters: &'a [u8],
    global: &'a mut GlobalMemory,
    shared: Vec<u8>,
    threads: Vec<Thread>,
}

impl<'a> Block<'a> {
    fn new(
        program: &'a Program,
        grid: Grid,
        index: [u32; 3],
        parameters: &'a [u8],
        global: &'a mut GlobalMemory,
    ) -> Self {
        let [x, y, z] = grid.threads;
        let ids = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])));
        let thread = |id| Thread {
            registers: vec![0; program.registers],
            next: 0,
            state: State::Running,
            id,
        };
        // Shared memory, too, is NaN until it is written.
        let shared = vec![0xff; grid.shared_bytes];
        Self {
            program,
            grid,
            index,
            parameters,
            global,
            shared,
            threads: ids.map(thread).collect(),
        }
    }

    fn run(&mut self, budget: &mut u64) -> Result<(), CodegenError> {
        loop {
            for thread in 0..self.threads.len() {
                self.advance(thread, budget)?;
            }
            let mut moved = false;
            for first in (0..self.threads.len()).step_by(32) {
                moved |= self.warp_operation(first)?;
            }
            if moved {
                continue;
            }
            let live = || self.threads.iter().filter(|thread| thread.state != State::Done);
            if live().next().is_none() {
                return Ok(());
            }
            if live().any(|thread| thread.state != State::Block) {
                return Err(stuck("threads wait for others that never come"));
            }
            for thread in &mut self.threads {
                if thread.state == State::Block {
                    thread.state = State::Running;
                    thread.next += 1;
                }
            }
        }
    }

    /// Runs a thread until it waits or ends.
    fn advance(&mut self, index: usize, budget: &mut u64) -> Result<(), CodegenError> {
        let program = self.program;
        while self.threads[index].state == State::Running {
            *budget = budget.checked_sub(1).ok_or_else(|| stuck("too many instructions"))?;
            let thread = &mut self.threads[index];
            let Some(instruction) = program.instructions.get(thread.next) else {
                thread.state = State::Done;
                break;
            };
            if let Some((register, expected)) = instruction.guard
                && (thread.registers[register] & 1 == 1) != expected
            {
                thread.next += 1;
                continue;
            }
            match &instruction.operation {
                Operation::Branch(target) => thread.next = *target,
                Operation::Exit => thread.state = State::Done,
                Operation::BlockBarrier => thread.state = State::Block,
                Operation::WarpBarrier | Operation::Shuffle(_) | Operation::Matrix => {
                    thread.state = State::Warp;
                }
                Operation::Load { space, bytes } => {
                    self.load(index, instruction, *space, *bytes)?;
                    self.threads[index].next += 1;
                }
                Operation::Store { space, bytes } => {
                    self.store(index, instruction, *space, *bytes)?;
                    self.threads[index].next += 1;
                }
                Operation::AtomicAdd => {
                    // Threads run one after the other.
                    let address = self.address(index, instruction);
                    let added = self.value(index, instruction.sources[1]) as u32;
                    let memory = self.global.bytes_mut(address, 4);
                    let memory = memory.ok_or_else(|| outside(Space::Global, address, 4))?;
                    let mut old = [0; 4];
                    old.copy_from_slice(memory);
                    let old = u32::from_le_bytes(old);
                    memory.copy_from_slice(&old.wrapping_add(added).to_le_bytes());
                    let thread = &mut self.threads[index];
                    thread.registers[instruction.destinations[0]] = old.into();
                    thread.next += 1;
                }
                Operation::Compute(compute) => {
                    let mut sources = [0; 4];
                    for (value, operand) in sources.iter_mut().zip(&instruction.sources) {
                        *value = self.value(index, *operand);
                    }
                    let result = evaluate(*compute, sources);
                    let thread = &mut self.threads[index];
                    // A packed result goes to several registers, lowest bits first.
                    let width = compute.result_bits(instruction.destinations.len());
                    for (i, &register) in instruction.destinations.iter().enumerate() {
                        thread.registers[register] =
                            arithmetic::field(result, i as u32 * width, width);
                    }
                    thread.next += 1;
                }
                Operation::Pack => {
                    let width = 64 / instruction.sources.len() as u32;
                    let width = if instruction.narrow { width / 2 } else { width };
                    let packed =
                        instruction.sources.iter().enumerate().fold(0, |packed, (i, part)| {
                            let part = arithmetic::field(self.value(index, *part), 0, width);
                            packed | part << (i as u32 * width)
                        });
                    let thread = &mut self.threads[index];
                    thread.registers[instruction.destinations[0]] = packed;
                    thread.next += 1;
                }
            }
        }
        Ok(())
    }

    fn value(&self, thread: usize, operand: Operand) -> u64 {
        let thread = &self.threads[thread];
        match operand {
            Operand::Register(register) => thread.registers[register],
            Operand::Immediate(value) => value,
            Operand::Thread(axis) => thread.id[axis].into(),
            Operand::Threads(axis) => self.grid.threads[axis].into(),
            Operand::Block(axis) => self.index[axis].into(),
            Operand::Blocks(axis) => self.grid.blocks[axis].into(),
            Operand::Lane => u64::from(self.linear(thread.id) % 32),
            Operand::WarpSize => 32,
        }
    }

    fn linear(&self, [x, y, z]: [u32; 3]) -> u32 {
        let [nx, ny, _] = self.grid.threads;
        (z * ny + y) * nx + x
    }

    /// The address of a memory operand: the first source and an offset.
    fn address(&self, thread: usize, instruction: &Instruction) -> u64 {
        self.value(thread, instruction.sources[0]).wrapping_add(instruction.offset)
    }

    fn load(
        &mut self,
        thread: usize,
        instruction: &Instruction,
        space: Space,
        bytes: usize,
    ) -> Result<(), CodegenError> {
        let address = self.address(thread, instruction);
        let length = bytes * instruction.destinations.len();
        let memory = match space {
            Space::Global => self.global.bytes(address, length),
            Space::Shared => slice(&self.shared, address, length),
            Space::Parameter => slice(self.parameters, address, length),
        };
        let memory = memory.ok_or_else(|| outside(space, address, length))?;
        let aligned = address.is_multiple_of(length as u64);
        if !aligned && space != Space::Parameter {
            return Err(stuck(&format!("{length} bytes at {address:#x} are not aligned")));
        }
        for (part, &register) in memory.chunks_exact(bytes).zip(&instruction.destinations) {
            let mut value = [0; 8];
            value[..bytes].copy_from_slice(part);
            self.threads[thread].registers[register] = u64::from_le_bytes(value);
        }
        Ok(())
    }

    fn store(
        &mut self,
        thread: usize,
        instruction: &Instruction,
        space: Space,
        bytes: usize,
    ) -> Result<(), CodegenError> {
        let address = self.address(thread, instruction);
        let values = &instruction.sources[1..];
        let length = bytes * values.len();
        let parts: Vec<_> = values.iter().map(|&value| self.value(thread, value)).collect();
        let memory = match space {
            Space::Global => self.global.bytes_mut(address, length),
            Space::Shared => usize::try_from(address)
                .ok()
                .and_then(|start| self.shared.get_mut(start..start.checked_add(length)?)),
            Space::Parameter => None,
        };
        let memory = memory.ok_or_else(|| outside(space, address, length))?;
        if !address.is_multiple_of(length as u64) {
            return Err(stuck(&format!("{length} bytes at {address:#x} are not aligned")));
        }
        for (part, value) in memory.chunks_exact_mut(bytes).zip(parts) {
            part.copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
        Ok(())
    }
}

fn slice(memory: &[u8], address: u64, length: usize) -> Option<&[u8]> {
    let start = usize::try_from(address).ok()?;
    memory.get(start..start.checked_add(length)?)
}

fn outside(space: Space, address: u64, length: usize) -> CodegenError {
    stuck(&format!("{length} bytes at {address:#x} are outside {space:?} memory"))
}

fn stuck(what: &str) -> CodegenError {
    CodegenError::Emulation { what: what.to_owned() }
}

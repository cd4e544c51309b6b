//! Global memory of the emulator: CubeCL's allocations at made-up addresses.

use cubecl::server::IoError;
use cubecl_runtime::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};
use std::collections::HashMap;

/// Bits of an address within an allocation; those above are the allocation's number.
const OFFSET_BITS: u32 = 40;

/// Allocations by number, from 1: address 0 is in none.
#[derive(Debug, Default)]
pub(crate) struct GlobalMemory {
    allocations: HashMap<u64, Vec<u8>>,
    next: u64,
}

impl GlobalMemory {
    pub(super) fn bytes(&self, address: u64, length: usize) -> Option<&[u8]> {
        let memory = self.allocations.get(&(address >> OFFSET_BITS))?;
        super::slice(memory, address & ((1 << OFFSET_BITS) - 1), length)
    }

    pub(super) fn bytes_mut(&mut self, address: u64, length: usize) -> Option<&mut [u8]> {
        let memory = self.allocations.get_mut(&(address >> OFFSET_BITS))?;
        let start = usize::try_from(address & ((1 << OFFSET_BITS) - 1)).ok()?;
        memory.get_mut(start..start.checked_add(length)?)
    }
}

/// CubeCL's view of it.
#[derive(Debug, Default)]
pub struct HostStorage {
    pub(in crate::offline) memory: GlobalMemory,
    numbers: HashMap<StorageId, u64>,
}

impl HostStorage {
    /// Bytes of a buffer.
    pub(crate) fn bytes_mut(&mut self, handle: &StorageHandle) -> Option<&mut [u8]> {
        let address = self.address(handle)?;
        self.memory.bytes_mut(address, usize::try_from(handle.size()).ok()?)
    }

    fn address(&self, handle: &StorageHandle) -> Option<u64> {
        Some((self.numbers.get(&handle.id)? << OFFSET_BITS) + handle.offset())
    }
}

impl ComputeStorage for HostStorage {
    /// The address; 0 if there is no such allocation.
    type Resource = u64;

    fn alignment(&self) -> usize {
        256
    }

    fn get(&mut self, handle: &StorageHandle) -> u64 {
        self.address(handle).unwrap_or(0)
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let bytes = usize::try_from(size)
            .map_err(|_| IoError::BufferTooBig { size, backtrace: Default::default() })?;
        self.memory.next += 1;
        // All bits set are NaN in every float format.
        self.memory.allocations.insert(self.memory.next, vec![0xff; bytes]);
        let id = StorageId::new();
        self.numbers.insert(id, self.memory.next);
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        if let Some(number) = self.numbers.remove(&id) {
            self.memory.allocations.remove(&number);
        }
    }

    fn flush(&mut self) {}
}

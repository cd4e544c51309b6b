//! Page identifiers, reference counts and the free list of one layer group.

/// Number of a page within its layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

impl PageId {
    /// Stands in a page table for a page that has been given up; its tokens are masked.
    pub const DROPPED: Self = Self(u32::MAX);

    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Hands out pages; a page returns to the free list when its last user releases it.
#[derive(Debug)]
pub(crate) struct PageAllocator {
    /// Users of each page that was ever handed out.
    users: Vec<u32>,
    free: Vec<PageId>,
    capacity: usize,
}

impl PageAllocator {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { users: Vec::new(), free: Vec::new(), capacity }
    }

    pub(crate) fn free_count(&self) -> usize {
        self.capacity - self.users.len() + self.free.len()
    }

    /// Pages with at least one user.
    pub(crate) fn used_count(&self) -> usize {
        self.users.len() - self.free.len()
    }

    /// A page with one user; recycled ones first, so that a pool grows no more than it must.
    pub(crate) fn allocate(&mut self) -> Option<PageId> {
        if let Some(page) = self.free.pop() {
            self.users[page.index()] = 1;
            return Some(page);
        }
        if self.users.len() == self.capacity {
            return None;
        }
        self.users.push(1);
        Some(PageId(self.users.len() as u32 - 1))
    }

    pub(crate) fn share(&mut self, page: PageId) {
        self.users[page.index()] += 1;
    }

    pub(crate) fn is_shared(&self, page: PageId) -> bool {
        self.users[page.index()] > 1
    }

    /// Takes one user away and says whether it was the last.
    pub(crate) fn release(&mut self, page: PageId) -> bool {
        let users = &mut self.users[page.index()];
        *users -= 1;
        let last = *users == 0;
        if last {
            self.free.push(page);
        }
        last
    }
}

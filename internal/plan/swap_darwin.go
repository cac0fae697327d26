package plan

import "golang.org/x/sys/unix"

// swap exchanges two directories at once: no reader finds either name without one.
func swap(a, b string) error {
	return unix.RenamexNp(a, b, unix.RENAME_SWAP)
}

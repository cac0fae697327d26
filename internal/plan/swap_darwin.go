// SPDX-License-Identifier: Apache-2.0

package plan

import "golang.org/x/sys/unix"

// swap exchanges two directories atomically: both names exist at all times.
func swap(a, b string) error {
	return unix.RenamexNp(a, b, unix.RENAME_SWAP)
}

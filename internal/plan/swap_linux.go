// SPDX-License-Identifier: Apache-2.0

package plan

import "golang.org/x/sys/unix"

// swap exchanges two directories atomically: both names exist at all times.
func swap(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

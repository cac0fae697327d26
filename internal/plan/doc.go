// SPDX-License-Identifier: Apache-2.0

// Package plan stores solved plans: a directory of files for engines, the request router and users (docs/formats.md).
//
// Invariants:
//   - Equal plans have equal bytes. No hashed file contains a time, a path or the name of a machine.
//   - The plan digest, the sha256 of manifest.json, covers every byte except report.json. The layout digest, the sha256 of
//     placement.json, covers what the engine does. The tables contain the layout digest of the layout that they are for.
//   - A directory contains a complete plan or none. Read verifies every hash and names a damaged file.
//   - An error in the files is an *InvalidError. All other errors are I/O errors.
package plan

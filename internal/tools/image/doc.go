// SPDX-License-Identifier: Apache-2.0

// Package image builds container images without a container engine, a registry or a base image. An image contains one
// static program and the certificates of public certificate authorities. It is written as a tar of an OCI image layout,
// which containerd, podman and docker can load.
//
// Invariants:
//   - The same options give the same bytes: dates, owners and map order do not affect the image. Layers are not
//     compressed, because the output of a compressor may change between Go releases.
//   - Only programs that can start in an empty root file system are accepted: ELF for Linux, without an interpreter.
//   - Nothing is written before all options are validated. Build does not access files.
package image

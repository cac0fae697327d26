// Package image makes container images without a container engine, a registry or a base image: one static program, and the public
// certificate authorities that it may ask, in an otherwise empty root file system, as a tar of an OCI image layout that containerd, podman
// and docker load.
//
// Invariants:
//   - The same options give the same bytes: no date, no owner and no map order of the machine gets in. Layers are not
//     compressed, because a compressor's output may change from one Go release to the next.
//   - Only programs that can start in an empty root file system are accepted: ELF, for Linux, without an interpreter.
//   - Nothing is written before all options are found valid. Build neither reads nor writes files.
package image

// SPDX-License-Identifier: Apache-2.0

// Command etcd is the etcd server that the oldest release is tested with.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }

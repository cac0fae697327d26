// SPDX-License-Identifier: Apache-2.0

// Command coredns is CoreDNS with only the plugins that a test cluster needs. It is a separate module, so that its
// dependencies do not appear in the operator's go.mod.
//
// The cache plugin is omitted: with it, the name of a replaced StatefulSet pod would resolve to the old address for
// some seconds, and tests of rollouts would have to wait.
package main

import (
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

func init() {
	// Plugins run in this order, regardless of their order in the Corefile. It is the order of CoreDNS's plugin.cfg.
	dnsserver.Directives = []string{"ready", "health", "errors", "log", "loadbalance", "kubernetes"}
}

func main() { coremain.Run() }

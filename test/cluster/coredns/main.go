// CoreDNS with the plugins that a test cluster needs and no others. It is a module of its own, so that none of its
// dependencies reaches the operator's go.mod.
//
// There is no cache plugin on purpose: with it, the name of a rolled StatefulSet pod gives the old address for some
// seconds, and tests that follow a roll-out would have to wait for that.
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
	// Plugins run in this order, whatever the order in the Corefile: the one of CoreDNS's own plugin.cfg.
	dnsserver.Directives = []string{"ready", "health", "errors", "log", "loadbalance", "kubernetes"}
}

func main() { coremain.Run() }

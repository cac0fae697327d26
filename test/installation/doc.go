// Package installation tells the life of an installation on a real cluster: two nodes with kubelet, containerd and CoreDNS, made by
// test/cluster. The chart is installed by Helm, and the sample of the README applied by kubectl; a client asks the model by its DNS
// name and through its Service all the while, and says at each step how many of its requests have failed.
//
// The tests install and uninstall the operator, and end processes of the cluster: they are told only with -args -cluster, and
// make e2e-installation makes the cluster for them.
package installation

#include <linux/init.h>
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

static unsigned int interval = 10;
module_param(interval, uint, 0444);
MODULE_PARM_DESC(interval, "seconds between two samples");

static atomic_t opened = ATOMIC_INIT(0);

static int sample_show(struct seq_file *m, void *v)
{
	seq_printf(m, "interval %u\n", interval);
	seq_printf(m, "opened %d\n", atomic_read(&opened));
	seq_printf(m, "jiffies %lu\n", jiffies);
	return 0;
}

static int sample_open(struct inode *inode, struct file *file)
{
	atomic_inc(&opened);
	return single_open(file, sample_show, NULL);
}

static const struct proc_ops sample_ops = {
	.proc_open = sample_open,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
};

static int __init sample_init(void)
{
	if (!proc_create("sample", 0444, NULL, &sample_ops))
		return -ENOMEM;
	pr_info("sample: loaded\n");
	return 0;
}

static void __exit sample_exit(void)
{
	remove_proc_entry("sample", NULL);
}

module_init(sample_init);
module_exit(sample_exit);
MODULE_LICENSE("GPL");

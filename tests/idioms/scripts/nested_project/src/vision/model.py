"""A small residual network whose normalisation can be synchronised."""

from torch import nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    def __init__(self, planes=8, blocks=2, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, planes, 3, padding=1, bias=False)
        self.layers = nn.Sequential(*[BasicBlock(planes) for _ in range(blocks)])
        self.linear = nn.Linear(planes, classes)

    def forward(self, x):
        out = self.layers(F.relu(self.conv1(x)))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


def build(synchronised):
    net = ResNet()
    return nn.SyncBatchNorm.convert_sync_batchnorm(net) if synchronised else net
